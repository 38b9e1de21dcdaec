"""An import of a name that is not there."""
from package import part, no_such_part
