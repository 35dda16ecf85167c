"""Whether torch.compile can do here what the compile section asks for.

Torch loads a back end when it meets the first block, so everything below would otherwise end a run in
its first step, on every rank.
"""

import importlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator

from torchtitan.config import CompileConfig
from torchtitan.distributed.compile import COMPONENTS
from torchtitan.tools.utils import device_type

_WITHOUT_A_COMPILER = (
    "install it, or choose --compile.backend aot_eager or eager, which need no compiler and are for "
    "trying out: they save no time"
)


def compiler_problems(chosen: CompileConfig) -> Iterator[str]:
    """What keeps the components of ``chosen`` from being compiled; nothing while compilation is off."""
    if not chosen.enable:
        return
    if unknown := sorted(set(chosen.components) - set(COMPONENTS)):
        yield (
            f"--compile.components names {', '.join(unknown)}, which cannot be compiled; choose from "
            f"{', '.join(COMPONENTS)}."
        )
    elif not chosen.components:
        yield (
            f"--compile.components is empty, so --compile.enable would do nothing; name {' or '.join(COMPONENTS)}, "
            "or leave --compile.enable out."
        )
    # Loads most of the compiler, a second that only those who want it pay.
    known = importlib.import_module("torch._dynamo").list_backends(exclude_tags=())
    if chosen.backend not in known:
        usual = [name for name in ("inductor", "aot_eager", "eager") if name in known]
        yield (
            f"--compile.backend {chosen.backend} is no back end of torch.compile here; use "
            f"{', '.join(usual)}, or install the package that brings it."
        )
    elif chosen.backend == "inductor":
        yield from _inductor_problems()


def _inductor_problems() -> Iterator[str]:
    if device_type != "cpu":
        if importlib.util.find_spec("triton") is None:
            yield (
                f"--compile.backend inductor makes kernels for {device_type} with Triton, but the package triton is "
                f"not installed; {_WITHOUT_A_COMPILER}."
            )
        return
    search = importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler
    try:
        search()
    # Its own error class is as deep inside of torch as the function.
    except Exception as error:
        yield (
            "--compile.backend inductor makes kernels for the CPU with a C++ compiler, but there is none "
            f"({_first_line(error)}); {_WITHOUT_A_COMPILER}."
        )
        return
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        yield (
            "--compile.backend inductor makes kernels for the CPU that include Python.h, but it is not in "
            f"{headers}, where the headers of this Python belong; {_WITHOUT_A_COMPILER}."
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
