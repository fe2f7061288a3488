"""The process and its machine: processors, memory, threads, ranks, progress."""
