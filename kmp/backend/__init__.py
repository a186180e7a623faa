"""What kmp replaces and uses of Keras' and TensorFlow's private names, each with its reason."""
