"""Pictures as SVG, and the markup that they and the sections are made of."""
