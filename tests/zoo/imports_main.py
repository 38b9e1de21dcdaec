"""A module that imports __main__, and the script by its own name: the one is the same module, the other is another."""
import sys

if __name__ == "__main__":
    import __main__
    import imports_main

    print(__main__ is sys.modules[__name__], imports_main is __main__, imports_main.__file__ == __file__)
    sys.modules["__main__"].added = 1
    print(added, eval("__main__.added"), sys.modules["__main__"].__dict__ is globals())
