"""SmolVLM and SmolVLM2, without video: an Idefics3."""

from aioengine.families.idefics3 import read

PLUGIN = read
