"""What is measured: shapes, their tensors, and the rows of the tables."""
