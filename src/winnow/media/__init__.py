"""Images of prompts: where they may come from, how large they may be, and how they are read."""

from winnow.media.fetch import Fetcher, is_public
from winnow.media.loader import MediaLoader

__all__ = ["Fetcher", "MediaLoader", "is_public"]
