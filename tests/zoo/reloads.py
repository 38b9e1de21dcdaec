"""Install import finders, one of which blocks torch, and create and reload a module."""
import importlib
import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "made_up":
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.value = 7


class KeepsOut(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ImportError("torch is kept out")
        return None


sys.meta_path.append(Finder())
sys.meta_path.insert(1, KeepsOut())
import made_up

importlib.reload(made_up)
importlib.invalidate_caches()
print(made_up.value, importlib.util.find_spec("package.part").origin)
import torch
