"""An import of the script's own that fails inside."""
import broken
