"""A failing layer cut out of a validation, made small, and written as a file that runs anywhere."""
