"""Device code in Triton's language; `winnow.attention.triton` launches it.

Names in capitals are compile-time constants. LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGE_ENTRIES and PAGES_PER_SEQ are
the cache's layout; GROUP query heads share a KV head; DOT is the dtype of matrix products, accumulated in float32.
Tensor arguments are pointers to the first element. Kernels read the lengths of rows from memory: grids only have to be
large enough.
"""
