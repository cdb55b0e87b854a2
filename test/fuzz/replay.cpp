// Runs a target over files, in the place of a fuzzer: for compilers that have none.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    std::fprintf(stderr, "Running: %s\n", names[i]);
    std::ifstream file(names[i], std::ios::binary);
    const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(content.data()), content.size());
  }
  std::fprintf(stderr, "Executed %d inputs\n", count - 1);
}
