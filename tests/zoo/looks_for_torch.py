"""Look for torch without an import, and import it when it is not installed."""
import importlib.metadata
import importlib.util
import sys

sys.path = [each for each in sys.path if "site-packages" not in each]
print(importlib.util.find_spec("torch"), "torch" in sys.modules)
try:
    import torch
except ImportError as error:
    print(type(error), error, error.name, error.path, error.__traceback__.tb_next)
import torch.optim
