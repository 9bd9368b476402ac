"""A failing layer cut out of a validation, and written as a file that runs anywhere."""
