"""Records of a hang by PyTorch and NCCL, and how they agree with the finding of this package."""
