"""What a head can express with D features, without a network: the synthetic bottleneck."""
