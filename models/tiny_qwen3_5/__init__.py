"""How a small hybrid of Gated DeltaNet, attention and an MTP layer is trained."""
