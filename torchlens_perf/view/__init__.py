"""What people see of a report: headline, tables and charts as values, and the renderers that draw them."""
