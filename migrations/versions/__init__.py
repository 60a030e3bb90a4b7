"""One module per revision; the file name starts with the revision's number."""
