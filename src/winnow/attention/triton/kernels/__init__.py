"""What runs on the device, in Triton's language; `winnow.attention.triton` decides what is launched.

Names in capitals are known when a kernel is compiled. LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGE_ENTRIES and
PAGES_PER_SEQ are the cache's layout; GROUP query heads share a KV head; DOT is the number format of matrix products,
whose sums are float32. Tensors are pointers to the first element of what the kernel's docstring says. A kernel asks
rows for their lengths itself: grids only have to be large enough.
"""
