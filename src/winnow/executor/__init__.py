"""The step computed: the model over the paged cache, its signals for eviction, CUDA graphs, sampling."""
