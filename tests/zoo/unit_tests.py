"""Unit tests and doctests of __main__.

>>> 1 + 1
2
"""
import doctest
import io
import unittest


class Tests(unittest.TestCase):
    def test_main(self):
        self.assertEqual(__name__, "__main__")

    def test_fails(self):
        self.fail("on purpose")


print(doctest.testmod())
print(unittest.main(testRunner=unittest.TextTestRunner(io.StringIO()), exit=False).result.failures)
