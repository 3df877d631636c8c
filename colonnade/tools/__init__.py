"""Tools on top of the library: training from the command line, and later verifying and explaining a layout."""
