"""Statistics of a folder of prefixes."""

from dataclasses import dataclass


@dataclass
class DiskTierStats:
    """Statistics of prefixes on disk (`prefix_cache_dir`); counters run from the engine's start."""

    bytes_used: int = 0
    """Bytes of all files in the folder, other models' and processes' too."""
    bytes_budget: int = 0
    num_files: int = 0
    """Files of this model and cache."""
    loaded_tokens: int = 0
    """Tokens whose KVs came from disk."""
    bytes_read: int = 0
    read_seconds: float = 0.0
    bytes_written: int = 0
    num_dropped: int = 0
    num_damaged: int = 0
    """Files that could not be read, or were not what was written."""
    num_foreign: int = 0
    """Files of other models, caches or keys."""
    is_writing: bool = True
    """False: the disk refused a file, and none is written for a while."""
