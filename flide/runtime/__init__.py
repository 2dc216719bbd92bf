"""From requests to streams and back. Light on purpose: the engine is imported from ``flide`` or its own module."""

from flide.runtime.metadata import ForkMetadata, StreamCapacity, TrunkCache
from flide.runtime.tree import TokenTree

__all__ = ["ForkMetadata", "StreamCapacity", "TokenTree", "TrunkCache"]
