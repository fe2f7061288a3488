"""Whether answers stay the same: across kernels, model classes, policies and formats."""
