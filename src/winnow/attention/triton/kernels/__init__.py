"""Device code in Triton's language; `winnow.attention.triton` launches it.

Names in capitals are compile-time constants. CACHE is a `CacheShape`, KEY, VALUE and SIDE are `SideFormat`s, which
say where in a block the fields of a side lie; GROUP query heads share a KV head; DOT is the dtype of matrix products,
accumulated in float32. `storage` is the pool's, as bytes.
Tensor arguments are pointers to the first element. Kernels read the lengths of rows from memory: grids only have to be
large enough.
"""
