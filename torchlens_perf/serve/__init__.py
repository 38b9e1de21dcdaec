"""The live page: runs under a folder, each as its page, which follows it. Reads run directories and nothing else."""
