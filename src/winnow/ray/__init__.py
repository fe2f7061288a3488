"""Winnow on a Ray cluster: a pile of prompts over many machines (`pip install winnow-llm[ray]`).

`worker` is an engine that takes lines as they come; `fleet` holds one worker per machine or card and runs a file over
them, which `winnow run --ray` does; `processor` makes a worker a stage of Ray Data, in the form of Ray's own LLM
processors. Nothing else of Winnow imports Ray.
"""

from winnow.ray.processor import ProcessorConfig, build_processor

__all__ = ["ProcessorConfig", "build_processor"]
