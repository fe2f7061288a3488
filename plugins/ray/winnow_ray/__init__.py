"""Winnow on a Ray cluster: a pile of prompts over many machines (`pip install ./plugins/ray`).

`processor` is a stage of Ray Data, in the form of Ray's own LLM processors; `serve` an application of Ray Serve.
Nothing else of Winnow imports Ray.
"""

from winnow_ray.processor import ProcessorConfig, build_processor

__all__ = ["ProcessorConfig", "build_processor"]
