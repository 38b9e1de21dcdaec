"""Import __main__, which is this module, and the script by name, which is a second module."""
import sys

if __name__ == "__main__":
    import __main__
    import imports_main

    print(__main__ is sys.modules[__name__], imports_main is __main__, imports_main.__file__ == __file__)
    sys.modules["__main__"].added = 1
    print(added, eval("__main__.added"), sys.modules["__main__"].__dict__ is globals())
