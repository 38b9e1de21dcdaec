"""Warnings that are shown only in __main__, once for each place, with the source line."""
import warnings


def old():
    warnings.warn("old", DeprecationWarning, stacklevel=2)


for _ in range(2):
    old()
warnings.warn("pending", PendingDeprecationWarning)
warnings.warn("plain")
"\d"
print(sorted(str(key) for key in __warningregistry__), 1 is 1)
open(__file__)
