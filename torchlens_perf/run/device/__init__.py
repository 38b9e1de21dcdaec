"""Code that divides device steps into parts and encodes windows that ranks have merged."""
