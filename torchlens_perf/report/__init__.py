"""What people read: the report's value (build), its sentences (verdict), and the terminal (terminal)."""
