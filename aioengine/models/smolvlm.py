"""SmolVLM and SmolVLM2, without video: an Idefics3."""

from aioengine.models.idefics3 import Idefics3

PLUGIN = Idefics3
