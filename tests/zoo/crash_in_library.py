"""An exception that leaves the standard library and its callbacks, with an import on the way."""
import json

json.loads("{", object_hook=dict, parse_float=lambda text: 1 / 0)
