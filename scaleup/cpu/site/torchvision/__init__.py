"""Stands in for torchvision, whose published build does not load beside a CPU torch.

SGLang imports it for image models. Any submodule can be imported and any name taken from it; text
models call none of them.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, _Finder, is_package=True) if name.startswith(_PREFIX) else None

    @staticmethod
    def create_module(spec):
        return _Module(spec.name)

    @staticmethod
    def exec_module(module):
        pass


__version__ = "0.0"  # transformers asks for it
_PREFIX = __name__ + "."
sys.meta_path.append(_Finder)
sys.modules[__name__].__class__ = _Module
