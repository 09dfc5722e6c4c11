"""What an output must match, as callers write it: checked, and brought into the form of grammars."""
