"""Import a module that raises an exception while it is imported."""
import broken
