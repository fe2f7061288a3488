"""Where there is no GPU, Triton's kernels run in its interpreter.

Triton asks for that when it is first imported, and nothing imports it before the tests of this folder are collected.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
