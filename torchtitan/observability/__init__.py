"""What a run tells about itself, in a form that programs can read. Standard library only."""
