"""Import a name that its package does not define."""
from package import part, no_such_part
