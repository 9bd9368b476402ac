"""A small hybrid of Gated DeltaNet, attention and an MTP layer that ships."""
