"""Stands in for SGLang's kernels: on a CPU SGLang imports names from here and calls none of them."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU form")

    return missing
