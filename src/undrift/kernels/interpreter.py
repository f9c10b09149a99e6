"""Triton's interpreter, made to work with present versions of numpy, and at a bearable speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np


def mend() -> None:
    """Change three things in Triton 3.6's interpreter.

    A scalar may bound a loop (it takes int() of arrays, which numpy 2.4 refuses); integers wrap
    without each of them being checked; our own maximum is numpy's, not a loop over elements.
    """
    from triton.runtime import interpreter

    from undrift.kernels.programs.pooling import larger

    if hasattr(interpreter, "_undrift_mended"):
        return
    patch, reduce = interpreter._patch_lang_tensor, interpreter.ReduceOps.apply_impl

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def reduce_fast(self: Any, input: Any) -> Any:
        if self.combine_fn is larger:
            return self.min_max(input[0], val_reduce_op=np.max)
        return reduce(self, input)

    interpreter._undrift_mended = True
    interpreter._patch_lang_tensor = patch_and_mend
    interpreter.ReduceOps.apply_impl = reduce_fast
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
