"""What builds a layer of attention and a dense MLP whole, named after the model whose kernels were published."""
