"""DeepSpeed: its real engine and ZeRO optimizers, on the phantom GPU as one rank of the world."""
