"""LLaVA 1.5: every image has one size, and as many tokens as the tower has patches."""

from aioengine.models._image_decoder import ImageDecoder

PLUGIN = ImageDecoder
