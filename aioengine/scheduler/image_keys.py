"""Images of prompts in the scheduler: their keys in the prefix cache, and the number of images that a step may start.

All positions of an image have the same placeholder id, whatever the image shows. The prefix cache uses an id derived
from the content of the image instead, so that only equal images share pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.protocol.messages import Media


def with_image_keys(token_ids: list[int], media: Sequence[Media]) -> list[int]:
    """Return the ids of a prompt for the prefix cache. Image positions have a negative id, the digest of the content.

    One id for all positions of an image is enough, because the digest also covers the number of positions.
    """
    ids = token_ids.copy()
    for image in media:
        key = -1 - int.from_bytes(image.content, "big")
        ids[image.start : image.start + image.num_tokens] = [key] * image.num_tokens
    return ids


class ImageBudget:
    """Limits the images that one step starts, because the vision tower computes each image in one step.

    The images of a step have at most ``chunk_tokens`` features together. A larger image is the only one of its step.
    """

    def __init__(self, chunk_tokens: int, *, keeps_whole: bool) -> None:
        """keeps_whole: all tokens of an image are computed in one step; one image of a step may exceed the budget."""
        self._left = chunk_tokens
        self._is_untouched = True
        self._keeps_whole = self._may_exceed = keeps_whole

    def limited(self, media: Sequence[Media], start: int, count: int, *, is_first: bool) -> int:
        """Return how many of ``count`` tokens of a prompt, starting at ``start``, fit into this step, and take their
        images from the budget.

        is_first: this is the first step of the prompt. An image started in an earlier step costs nothing, because its
        features are kept.
        """
        for image in media:
            begins = image.start >= start or (is_first and image.start + image.num_tokens > start)
            if not begins or image.start >= start + count:
                continue
            if image.num_features > self._left and not self._is_untouched:
                return max(image.start - start, 0)
            self._left -= image.num_features
            self._is_untouched = False
        return self._whole(media, start, count) if self._keeps_whole else count

    def _whole(self, media: Sequence[Media], start: int, count: int) -> int:
        """Return ``count``, changed so that no image is split."""
        for image in media:
            end = image.start + image.num_tokens
            if image.start < start + count < end:
                if image.start > start:
                    return image.start - start
                if not self._may_exceed:
                    return 0
                self._may_exceed = False
                return end - start
        return count
