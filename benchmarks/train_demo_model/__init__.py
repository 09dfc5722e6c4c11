"""How the demo model of the package was made: what it is taught, and how."""
