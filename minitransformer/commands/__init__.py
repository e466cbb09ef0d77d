"""The commands of `minitransformer`, a file each; the two scripts use some of them."""
