"""The page's sections: each is a fragment that stands alone."""
