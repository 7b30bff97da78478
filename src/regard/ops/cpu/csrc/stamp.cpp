// The hash of the sources from which a library was compiled.
extern "C" __attribute__((visibility("default"))) const char* sources_hash() { return SOURCES_HASH; }
