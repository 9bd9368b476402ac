"""The C++ that PyPTO emits: how to write it so that it compiles, and what can be checked in its text."""
