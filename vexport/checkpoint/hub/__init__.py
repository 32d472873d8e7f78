"""Models of the Hugging Face hub: names, the files that are needed, downloads, headers, errors."""
